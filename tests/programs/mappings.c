#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <errno.h>
// Does at random to its mappings what a program may do, and knows what is in each page: SEED STEPS FORKS.
#define N 24
#define MAXP 1024
static char *m[N]; static size_t n[N]; static uint32_t *v[N]; static int prot[N], locked[N];
static uint64_t x; static uint64_t r(void){x^=x<<13;x^=x>>7;x^=x<<17;return x;}
static void die(const char*w){printf("BAD %s %s\n",w,strerror(errno));fflush(stdout);_exit(3);}
static void put(int i,size_t p,uint32_t val){ uint32_t*q=(uint32_t*)(m[i]+p*4096); for(int k=0;k<1024;k+=64) q[k]=val?val+k:0; v[i][p]=val;}
static void look(int i,size_t p){ uint32_t*q=(uint32_t*)(m[i]+p*4096); uint32_t val=v[i][p]; for(int k=0;k<1024;k+=64) if(q[k]!=(val?val+k:0)){printf("BAD map %d page %zu k %d has %x wants %x\n",i,p,k,q[k],val?val+k:0);fflush(stdout);_exit(3);} }
int main(int c,char**a){ x=88172645463325252ull+atoi(a[1]); long steps=atol(a[2]); int forks=atoi(a[3]);
 for(long s=0;s<steps;s++){ int i=r()%N; 
  if(!m[i]){ n[i]=1+r()%MAXP; m[i]=mmap(0,n[i]*4096,3,MAP_PRIVATE|MAP_ANONYMOUS,-1,0); v[i]=calloc(n[i],4); locked[i]=0; if(r()%4==0) madvise(m[i],n[i]*4096,MADV_HUGEPAGE); for(size_t p=0;p<n[i];p++) if(r()%8) put(i,p,r()|1); continue;}
  size_t p=r()%n[i], k=1+r()%(n[i]-p); if(k>200) k=200;
  switch(r()%16){
  case 0: if(r()%4==0){munmap(m[i],n[i]*4096); free(v[i]); m[i]=0;} break;
  case 1: if(locked[i]) break; madvise(m[i]+p*4096,k*4096,MADV_DONTNEED); memset(v[i]+p,0,k*4); break;
  case 2: if(r()%3==0){ size_t w=1+r()%MAXP; char*q=mremap(m[i],n[i]*4096,w*4096,MREMAP_MAYMOVE); if(q==MAP_FAILED) die("mremap"); m[i]=q; v[i]=realloc(v[i],w*4); if(w>n[i]) memset(v[i]+n[i],0,(w-n[i])*4); n[i]=w; } break;
  case 3: { char*q=mmap(0,n[i]*4096,0,MAP_PRIVATE|MAP_ANONYMOUS,-1,0); q=mremap(m[i],n[i]*4096,n[i]*4096,MREMAP_MAYMOVE|MREMAP_FIXED,q); if(q==MAP_FAILED) die("mremap2"); m[i]=q; } break;
  case 4: mprotect(m[i],n[i]*4096,1); look(i,p); mprotect(m[i],n[i]*4096,3); break;
  case 5: if(r()%4==0){ if(mlock(m[i],n[i]*4096)==0) locked[i]=1; } else if(locked[i]) {munlock(m[i],n[i]*4096); locked[i]=0;} break;
  case 6: if(forks&&r()%16==0){ fflush(stdout); pid_t pid=fork(); if(pid==0){ for(int j=0;j<N;j++) if(m[j]) for(size_t q=0;q<n[j];q++) look(j,q); _exit(0);} int st; 
     if(r()%2){ int j=r()%N; if(m[j]) for(size_t q=0;q<n[j];q++) put(j,q,r()|1);} 
     if(waitpid(pid,&st,0)!=pid||st) {printf("BAD child %x\n",st);fflush(stdout);_exit(3);} } break;
  case 7: for(size_t q=p;q<p+k;q++) put(i,q,r()|1); break;
  default: for(size_t q=p;q<p+k;q++) look(i,q); if(r()%2) put(i,p,r()|1);
  } }
 for(int i=0;i<N;i++) if(m[i]) for(size_t p=0;p<n[i];p++) look(i,p);
 printf("good\n"); return 0; }
