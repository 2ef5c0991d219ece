"""Models in less memory and smaller files: pruning, shared weights, and a file format for them.

    small = compress(model, sparsity=0.5, clusters=16)
    save_compressed(small, "model.hybridw")
    load_compressed("model.hybridw", into=fresh_model)

Nothing here knows the backend: it makes PyTorch modules of plain operators, which run and compile everywhere.
"""
