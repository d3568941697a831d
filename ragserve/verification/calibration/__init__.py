"""What runs in processes of its own: calibrations that write profiles, and the engine of `ragserve tune`."""
