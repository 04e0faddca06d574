"""What the engine keeps of finished work: immutable blocks of encoded K/V in RAM and on disk. No MLX: payloads are opaque."""
