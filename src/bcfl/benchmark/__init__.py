"""The natural benchmark: federations divided by life, not by an experimenter, and what every method makes of them."""
