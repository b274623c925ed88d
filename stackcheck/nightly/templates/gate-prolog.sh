#!/bin/sh
<% if wanted.drain %>
# Slurm's Prolog. A node with a broken part is drained with the reason, and the job goes to another one.
<% else %>
# Slurm's Prolog. It only writes the log: Slurm drains a node whose prolog fails (--drain slurm).
<% endif %>
PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH
said=$(<< line >> 2>><< wanted.log >>)
code=$?
echo "$said" >><< wanted.log >>
<% if wanted.drain %>
case $said in *'"drains": true'*) exit 1 ;; esac
exit 0 # neither a check of a faulty image nor a GPU in use by another job drains a node
<% else %>
if [ $code -eq 9 ] || [ $code -eq 6 ]; then
  logger -t stackcheck-gate "not fit: code $code" || :
fi
exit 0
<% endif %>
