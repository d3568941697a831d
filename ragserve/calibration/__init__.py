"""Measurements that write the profiles: costs, decode crossover, SamKV's profile, streaming heads."""
