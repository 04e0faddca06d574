"""CUDA kernels of our own: attention of a few positions over slot buffers, and products of few rows.

Each splits a row's sums by fixed sizes, never by the shape of the step, so that neighbours do not change them.
"""
