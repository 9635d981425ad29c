"""Regularizers: those of dropout (Wei, Kakade and Ma) as a library for any torch module, and all as options of a job.

``layers`` hidden layers by hooks; ``draws`` the source of randomness; ``outputs`` losses and their output Hessians;
``dropout`` the equations, and what a step differentiates; ``objective`` a job's; ``sam``, ``early_stopping`` and
``alpha`` what acts on the loop. Nothing is imported here: import what is needed.
"""
