"""A real sentence encoder, all-MiniLM-L6-v2, with fp32 and with NVFP4 linear layers: ``python -m examples.minilm``."""
