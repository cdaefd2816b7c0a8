"""`python -m managed_cli` is `managed-cli`."""

from managed_cli.cli.app import main

if __name__ == "__main__":
    main()
