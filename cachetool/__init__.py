"""A size-capped local cache of training samples, fed from remote stores while PyTorch or TensorFlow trains from it."""
