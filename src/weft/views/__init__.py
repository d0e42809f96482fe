"""Tables and pictures: the process table, the graph of a program, and the Gantt chart of a simulation."""
