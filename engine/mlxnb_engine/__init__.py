"""The engine behind mlxnb: one thread that owns MLX and decodes all live requests as one shared batch.

Importing this package or `mlxnb_engine.client` loads neither MLX nor transformers.
"""
