"""Whether to believe us: measurements, parity checks, and the rows and reports that come of them."""
