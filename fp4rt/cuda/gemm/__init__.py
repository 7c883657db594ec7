"""Matrix products with NVFP4 weights: which kernel, with which tile, and its launch."""
