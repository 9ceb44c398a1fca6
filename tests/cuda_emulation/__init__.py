"""An emulated CUDA device for a torch built without CUDA: README.md."""
