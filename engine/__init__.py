"""Inference: model files, tokenizer, program, scheduler, sampling, the engine process and its client. May import kernels."""
