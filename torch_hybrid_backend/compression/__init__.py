"""Compression of models: pruning, shared weights, and a file format.

    small = compress(model, sparsity=0.5, clusters=16)
    save_compressed(small, "model.hybridw")
    load_compressed("model.hybridw", into=fresh_model)

Nothing here depends on the backend. Compressed models are PyTorch modules of plain operators, which run and compile everywhere.
"""
