"""An honest load tester for incremental decoding; the command is `segue load`. Needs the extra `load`."""
