"""Global scale, quantize, dequantize and relayout on a CUDA device: each chooses a launch, then launches it."""
