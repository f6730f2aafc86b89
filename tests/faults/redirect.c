// Preloaded into a rank: TCP connections to loopback go through the harness's proxy, which is told
// the port that was meant in two bytes.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

typedef int (*connect_function)(int, const struct sockaddr*, socklen_t);

int connect(int fd, const struct sockaddr* address, socklen_t size) {
  static connect_function real;
  if (real == NULL) real = (connect_function)dlsym(RTLD_NEXT, "connect");
  const char* port = getenv("FAULT_PROXY_PORT");
  int kind = 0;
  socklen_t kind_size = sizeof kind;
  getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &kind_size);
  const struct sockaddr_in* to = (const struct sockaddr_in*)address;
  if (port == NULL || kind != SOCK_STREAM || address->sa_family != AF_INET ||
      to->sin_addr.s_addr != htonl(INADDR_LOOPBACK))
    return real(fd, address, size);
  struct sockaddr_in proxy = *to;
  proxy.sin_port = htons((uint16_t)atoi(port));
  const int flags = fcntl(fd, F_GETFL);
  fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
  int result = real(fd, (const struct sockaddr*)&proxy, sizeof proxy);
  if (result == 0 && write(fd, &to->sin_port, 2) != 2) {
    errno = ECONNREFUSED;
    result = -1;
  }
  fcntl(fd, F_SETFL, flags);
  return result;
}
