"""An empty module: composer's logger for MosaicML's platform imports it."""
