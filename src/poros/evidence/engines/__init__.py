"""The methods that the benchmarks compare, one file each."""
