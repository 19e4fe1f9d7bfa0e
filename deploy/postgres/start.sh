#!/bin/sh
# Makes the cluster at the first start, then becomes the server. It listens on no network. A client
# needs the same user id (auth "peer") and the volume with the socket, so there is no password.
set -eu

bin=$(echo /usr/lib/postgresql/*/bin)
if [ ! -d /data/cluster ]; then
    rm -rf /data/new # of a start that was broken off
    "$bin/initdb" --auth=peer --username=riffle --encoding=UTF8 --locale=C --data-checksums \
        --pgdata=/data/new
    mv /data/new /data/cluster
fi
exec "$bin/postgres" -D /data/cluster -c listen_addresses= -c unix_socket_directories=/store
