"""What the SwiGLU operators share: the checks of their arguments, their launch, their values in torch."""
