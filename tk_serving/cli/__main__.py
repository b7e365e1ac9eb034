from tk_serving.cli import main

main()
