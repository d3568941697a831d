"""Plain data that travels with requests and in options: all of it may be imported by ragserve."""
