"""Train EAGLE-3 speculative-decoding drafts in JAX and ship them to SGLang."""

__version__ = "0.1.0"
