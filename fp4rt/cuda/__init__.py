"""The CUDA backend: device arrays in, device arrays out. The only part of fp4rt that imports CuPy."""
