"""SGLang on machines without a GPU: platform, allocator, attention. Inactive where CUDA is available."""
