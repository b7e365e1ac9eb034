from sglang_cpu_absent import names_of

__getattr__ = names_of("torchvision.io")
