"""How many slots, and in which layers: profiles, calibration, advice."""
