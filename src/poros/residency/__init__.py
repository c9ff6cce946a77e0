"""Where the frozen weights are: host store, GPU window, and the visits that need them."""
