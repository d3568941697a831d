"""What ragserve reads of SGLang's own objects. An upgrade of SGLang looks here and in process/hooks.py."""
