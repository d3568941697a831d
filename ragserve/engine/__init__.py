"""SGLang as the runtime: in this process group or elsewhere, behind one protocol (`base.Engine`)."""
