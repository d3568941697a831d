"""Code that runs inside SGLang's processes: the CPU platform, the plugin, the document cache and composed
contexts.
"""
