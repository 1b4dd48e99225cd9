"""Plans: the options of each command, the transfer that follows from them, one planner for each direction. Integers and
names; imports all but `stages`.
"""
