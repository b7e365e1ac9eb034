"""Stand-in for torchvision: SGLang and transformers import it at start, and call it for images only."""
