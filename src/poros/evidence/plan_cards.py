"""Cards by name: what their makers say of their speed. Peaks that no run reaches, so times from them are bounds."""

from dataclasses import dataclass

_PCIE = {4: 31.5e9, 5: 63.0e9}  # bytes a second over 16 lanes after 128b/130b coding, https://pcisig.com/specifications


@dataclass(frozen=True)
class Card:
    """A card's peaks: dense bf16 with float32 sums, memory, link of 16 lanes."""

    bf16_flops: float
    memory_bytes_per_s: float
    pcie: int
    hopper: bool = False

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes a second from the host."""
        return _PCIE[self.pcie]

    @property
    def workspace_bytes(self) -> int:
        """A cuBLAS workspace as torch asks for it: 32 MiB on Hopper, else 2 x 4 MiB + 8 x 16 KiB."""
        return 32 * 2**20 if self.hopper else 2 * 4096 * 1024 + 8 * 16 * 1024


CARDS: dict[str, Card] = {
    # https://www.nvidia.com/en-us/data-center/h200/
    "h200": Card(989e12, 4.8e12, 5, hopper=True),
    # https://www.nvidia.com/en-us/data-center/h100/ (SXM)
    "h100": Card(989e12, 3.35e12, 5, hopper=True),
    # https://www.nvidia.com/en-us/data-center/a100/ (80 GB, SXM)
    "a100": Card(312e12, 2.039e12, 4),
    # https://www.nvidia.com/en-us/data-center/l40s/
    "l40s": Card(362e12, 0.864e12, 4),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    "rtx5090": Card(209.5e12, 1.792e12, 5),
    "rtx4090": Card(165.2e12, 1.008e12, 4),
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
    "rtx3090": Card(71e12, 0.936e12, 4),
}
