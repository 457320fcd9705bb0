"""The tools themselves, one module for each thing that they work on."""
