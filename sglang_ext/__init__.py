"""Code that runs inside SGLang's processes. README.md is the map of its packages."""
