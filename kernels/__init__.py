"""CUDA sources, how they are built, and the layout of ops. Imports nothing of Quadjet."""
