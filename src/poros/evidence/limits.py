"""Upper limits of what specs and commands take: far beyond what anybody measures, and far below what overflows."""

MAX_STEPS = 10**6
MAX_SEQ_LEN = 2**20  # tokens
MAX_BATCH = 2**16  # rows of a batch, and batches of a step
MAX_RANK = 2**16  # above the width of every model
MAX_LAYERS = 10_000  # of a block, and blocks of a window
MAX_SEED = 2**32 - 1  # of the CPU's generator
MAX_RUN_S = 2 * 24 * 3600  # from the first pass of a run to its last: what lies further apart is not side by side
