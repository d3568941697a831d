"""Several engines behind one product: workers, which of them answers what, and deletion on all of them."""
