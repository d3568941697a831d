"""Measurements that write the profiles: costs, decode and prefill crossovers, samkv, streaming heads."""
