"""``memkern.Techniques``: what each option may be (options), its flags (flags), and what applies them (applying)."""
