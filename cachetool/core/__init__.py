"""Values that all rooms use: schemas, blocks, extents, units, errors. No module of this room reads or writes a file."""
