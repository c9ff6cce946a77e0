"""What the model is: its files, its quantised tensors, its families, and how it is put together."""
