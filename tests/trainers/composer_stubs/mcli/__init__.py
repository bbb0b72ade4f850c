"""Nothing: composer's logger for MosaicML's platform imports the module."""
