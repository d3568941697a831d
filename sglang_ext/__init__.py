"""What runs inside SGLang's processes: the CPU platform and the plugin through which everything else will come."""
