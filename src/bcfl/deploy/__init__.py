"""A federation of real processes: on this machine, or as a folder to be taken to several."""
