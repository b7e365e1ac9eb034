from tk_serving.operator import load_family

globals().update(load_family(__name__))
