"""How the bundled demo models were made: icons, training, healing, packaging.

Nothing here is needed to run the models. `python -m model_zoo.demo.train --help` lists the stages,
README.md beside this file gives the order, the times and what came out.
"""
