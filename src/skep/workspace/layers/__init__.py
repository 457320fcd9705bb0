"""Folders laid over each other, in the format of the kernel's overlay, and the trees they are kept in."""
