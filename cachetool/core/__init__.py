"""Values that every room uses: schema, blocks, extents, units, errors. Nothing here reads or writes a file."""
