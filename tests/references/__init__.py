"""What transformers computes on tiny random checkpoints, as data, and the code that recorded it.

The default suite needs `cases` and `weights` only, which are NumPy; the rest imports torch.
"""
